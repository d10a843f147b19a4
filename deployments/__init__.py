"""How Livery is shipped, scheduled and rehearsed."""
