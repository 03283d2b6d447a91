"""How each family of models writes its tool calls."""
