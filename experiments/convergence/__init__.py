"""How a delay changes what is learned, and what corrects it."""
