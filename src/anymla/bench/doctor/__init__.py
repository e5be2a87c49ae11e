"""What this machine runs of the package, how right and how fast, in half a minute."""
