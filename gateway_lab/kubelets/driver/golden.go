package main

import (
	"encoding/hex"
	"fmt"
	"reflect"
	"strings"
)

// golden fills every message of this version's API package, found from the methods of its services, and serialises it.
func golden() (reply, error) {
	types := map[string]reflect.Type{}
	for _, service := range services {
		for i := 0; i < service.NumMethod(); i++ {
			collect(types, service.Method(i).Type)
		}
	}
	messages, values := map[string]string{}, map[string]any{}
	for name, t := range types {
		message := reflect.New(t)
		values[name] = fill(message.Elem(), name, 1)
		wire, err := marshal(message.Interface())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		messages[name] = hex.EncodeToString(wire)
	}
	return reply{"messages": messages, "values": values}, nil
}

// collect finds messages: in the arguments and results of a method, in what a stream sends, in the fields of a message.
func collect(types map[string]reflect.Type, t reflect.Type) {
	switch t.Kind() {
	case reflect.Func:
		for i := 0; i < t.NumIn(); i++ {
			collect(types, t.In(i))
		}
		for i := 0; i < t.NumOut(); i++ {
			collect(types, t.Out(i))
		}
	case reflect.Interface:
		if send, ok := t.MethodByName("Send"); ok {
			collect(types, send.Type)
		}
	case reflect.Slice:
		collect(types, t.Elem())
	case reflect.Ptr:
		message := t.Elem()
		if _, known := types[message.Name()]; known || message.Kind() != reflect.Struct {
			return
		}
		types[message.Name()] = message
		for i := 0; i < message.NumField(); i++ {
			if protoName(message.Field(i)) != "" {
				collect(types, message.Field(i).Type)
			}
		}
	}
}

// protoName is a field's name in the proto file; "" for what is no field of the message.
func protoName(f reflect.StructField) string {
	for _, part := range strings.Split(f.Tag.Get("protobuf"), ",") {
		if name, found := strings.CutPrefix(part, "name="); found {
			return name
		}
	}
	return ""
}

// fill sets v and all that is in it, each to a value of its own: text is made of the path to it, numbers of n, which says
// which of several entries this is. It gives the same as plain values.
func fill(v reflect.Value, path string, n int) any {
	switch v.Kind() {
	case reflect.String:
		v.SetString(path)
		return path
	case reflect.Bool:
		v.SetBool(true)
		return true
	case reflect.Int32, reflect.Int64:
		v.SetInt(int64(100 + n))
		return v.Int()
	case reflect.Ptr:
		v.Set(reflect.New(v.Type().Elem()))
		return fill(v.Elem(), path, n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		list := []any{}
		for i := 0; i < v.Len(); i++ {
			list = append(list, fill(v.Index(i), fmt.Sprintf("%s.%d", path, i+1), i+1))
		}
		return list
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		entry := map[string]any{fmt.Sprint(fill(key, path+".key", 1)): fill(value, path+".value", 1)}
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
		return entry
	case reflect.Struct:
		message := map[string]any{}
		for i := 0; i < v.NumField(); i++ {
			if name := protoName(v.Type().Field(i)); name != "" {
				message[name] = fill(v.Field(i), path+"."+name, n)
			}
		}
		return message
	}
	panic(fmt.Sprintf("%s is of kind %s, which no message had yet: add it here", path, v.Kind()))
}
