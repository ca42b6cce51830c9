"""Training runs: what they do, and what they leave behind."""
