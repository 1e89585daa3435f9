"""What was learned of scripts, as the API shows it."""
