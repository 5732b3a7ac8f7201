"""The command `kvlane up`: a small persistent deployment on this machine."""
