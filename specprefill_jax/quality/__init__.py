"""Quality: tasks whose answers are known, and what comes of them densely and sparsely."""
