"""What somebody writes into Redis with the rights of one part: it may cost that, and no process."""
