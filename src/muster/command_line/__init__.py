"""What the words of a command line stand for, read by tyro (extra ``doctor``). The commands are in muster/cli.py."""
