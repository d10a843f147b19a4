"""What goes to the box first: the S3 store, transfers, detached jobs, checks of the box and the dead-man switch."""
