"""The operators' page of a gateway (`/console`): its endpoints, and the fleet that they show."""
