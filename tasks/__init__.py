"""How one step is done from the outside: thin Prefect tasks, and the plain code under them."""
