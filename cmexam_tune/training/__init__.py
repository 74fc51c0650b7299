"""Training: what happens between encoded questions and a saved adapter."""
