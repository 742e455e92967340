"""Whose each GPU is where one gateway serves both APIs: the device plugin API's or dynamic resource allocation's, never both's."""
