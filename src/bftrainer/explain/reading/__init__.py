"""Reading of scripts: their files, what names in them mean, and what runs in a loop."""
