from flash_cute.hub.fa3 import *  # noqa: F403
