"""Markets that rent boxes, behind one protocol."""
