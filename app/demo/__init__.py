"""`kvlane demo` and `kvlane up`: a deployment on one machine, and the story the demo tells."""
