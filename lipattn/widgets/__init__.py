"""Explorers for a live notebook: ipywidgets that drive the library. They need a kernel; pages do without them."""
