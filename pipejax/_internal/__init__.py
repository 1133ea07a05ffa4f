"""Private helpers that several packages share. They import no other package."""
