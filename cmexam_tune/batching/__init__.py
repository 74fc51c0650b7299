"""From questions to the micro-batches of every optimizer step."""
