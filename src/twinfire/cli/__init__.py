"""The `twinfire` command: reads options, starts processes, shows progress."""
