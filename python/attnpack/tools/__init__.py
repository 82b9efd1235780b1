"""The command line and what it runs: demo, bench, plot, generate, info."""
