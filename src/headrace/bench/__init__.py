"""Measurements of Headrace by itself: the real pipeline on made-up work, so that nothing but speed differs."""
