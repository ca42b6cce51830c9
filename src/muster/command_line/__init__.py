"""Words of a command line, and the options that they stand for, read by argparse. The commands are in muster/cli.py."""
