"""Workers: processes and threads that host envs, how they start, answer and end."""
