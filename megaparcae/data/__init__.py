"""From text to shards, and from shards to batches that are a pure function of the step."""
