"""What model families share: checkpoints, token rows, prefixes and decoding."""
