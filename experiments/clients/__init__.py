"""Programs and optimizers of others, trained by pipejax and by hand-written loops."""
