"""What the laptop and the box agree on: the recipe, the events, the manifest, the checks. Pydantic and the standard library only."""
