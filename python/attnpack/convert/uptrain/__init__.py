"""Training that gives a converted checkpoint back what it lost: `attnpack uptrain`."""
