"""The command line and its commands demo, bench, plot, generate and info."""
