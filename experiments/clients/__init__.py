"""Programs and optimizers that others wrote, in pipejax and by hand."""
