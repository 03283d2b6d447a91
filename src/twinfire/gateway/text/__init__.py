"""Text and tokens: incremental detokenising, stop strings, prompt rendering."""
