"""Closes the loop: processes, named loops, lifecycle, supervision."""
