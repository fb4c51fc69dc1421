"""Trackers show the curves of a run elsewhere: in Weights & Biases, TensorBoard, MLflow, Trackio, or your own."""
