"""What an exchange costs, measured or predicted."""
