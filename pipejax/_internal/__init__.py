"""What several packages need, and users do not: private, with no package below it."""
