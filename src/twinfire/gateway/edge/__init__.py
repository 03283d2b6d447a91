"""A thin proxy before the gateways of several regions: the same session goes to the same one."""
