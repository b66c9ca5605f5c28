"""The Python peer of cs336: what only Python can run (torch.compile), measured beside our own figures in one run."""
