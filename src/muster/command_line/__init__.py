"""What the words of a command line stand for, read by argparse. The commands are in muster/cli.py."""
