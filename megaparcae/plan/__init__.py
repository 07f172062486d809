"""What a run needs and how long it takes, before it starts; the best layout for a cluster."""
