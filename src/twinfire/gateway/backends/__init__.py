"""Ways to reach an engine. `twinfire` is our own workers over their link."""
