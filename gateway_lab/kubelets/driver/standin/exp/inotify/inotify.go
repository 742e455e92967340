// Package inotify stands in for the package of this import path that was removed upstream in 2018.
// Nothing the device manager does at run time reaches it.
package inotify

import "errors"

const (
	IN_ACCESS      uint32 = 0x1
	IN_MODIFY      uint32 = 0x2
	IN_CLOSE_WRITE uint32 = 0x8
	IN_MOVED_FROM  uint32 = 0x40
	IN_MOVED_TO    uint32 = 0x80
	IN_CREATE      uint32 = 0x100
	IN_DELETE      uint32 = 0x200
	IN_ATTRIB      uint32 = 0x4
	IN_DELETE_SELF uint32 = 0x400
	IN_MOVE        uint32 = IN_MOVED_FROM | IN_MOVED_TO
	IN_ONLYDIR     uint32 = 0x1000000
	IN_ISDIR       uint32 = 0x40000000
)

type Event struct {
	Mask   uint32
	Cookie uint32
	Name   string
}

type Watcher struct {
	Error chan error
	Event chan *Event
}

var errStub = errors.New("inotify: not available in this build")

func NewWatcher() (*Watcher, error)                         { return nil, errStub }
func (w *Watcher) Close() error                             { return errStub }
func (w *Watcher) AddWatch(path string, flags uint32) error { return errStub }
func (w *Watcher) Watch(path string) error                  { return errStub }
func (w *Watcher) RemoveWatch(path string) error            { return errStub }
