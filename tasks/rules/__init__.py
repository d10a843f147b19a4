"""The costly decisions, as pure functions of facts and a given `now`."""
