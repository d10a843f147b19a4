"""How a box is reached: one login that reconnects by itself, detached jobs, and what is sent first."""
