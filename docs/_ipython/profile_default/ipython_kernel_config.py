c.IPKernelApp.log_level = 40  # noqa: F821  errors only
