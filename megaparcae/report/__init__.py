"""A run's log as one HTML page."""
