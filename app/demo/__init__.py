"""The command `kvlane demo`: a deployment on one machine, and a scenario that shows it."""
