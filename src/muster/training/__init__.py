"""Training runs: their work, and the files that they leave."""
