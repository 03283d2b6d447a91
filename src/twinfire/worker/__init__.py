"""The process around an engine: its link to gateways, its loop, its drain. Never sees text."""
