"""Plans without hardware: the time of a step by a device's card, the engine on a virtual clock."""
