"""What a run leaves behind: its folder, and the picture of its learning curve."""
