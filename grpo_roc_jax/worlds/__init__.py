"""Generated problems: families of computations, chains of calls, functions, games, and demonstrations of them."""
